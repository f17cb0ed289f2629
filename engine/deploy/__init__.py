"""Files that put a server on a cluster or one machine: Kubernetes manifests, compose, vLLM's command line."""
