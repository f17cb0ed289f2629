"""The HTTP load client: worker processes that send requests and timestamp reads; parsing comes afterwards."""
