"""Laptop: emulated SageMaker hosts in Linux namespaces."""
