"""Laptop: Vertex AI custom jobs: pools, request, checks, upload, run."""
