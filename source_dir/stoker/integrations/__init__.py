"""Every host: models and loops of other frameworks on Stoker's data."""
