"""Every host: integrations with other frameworks and with user scripts."""
