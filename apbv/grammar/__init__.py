"""The tokens that a JSON schema or a grammar allows, and checks of both."""
