"""Laptop: the parts of `--on sagemaker`, which `launcher.backends.sagemaker` combines."""
