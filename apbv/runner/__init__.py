"""The model over new tokens, behind the KV of prompts."""
