"""Laptop: what `--on sagemaker` is made of; `launcher.backends.sagemaker` puts it together."""
