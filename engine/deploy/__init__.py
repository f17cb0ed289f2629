"""Deployment of a server: Kubernetes manifests, Docker compose files, vLLM's command line."""
