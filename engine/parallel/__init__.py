"""One model on several processes of one machine: every layer is divided among them."""
