"""What the tests share: models, prompts, oracles, processes, and an emulated GPU.

This imports nothing: ``session`` sets the environment before torch is imported.
"""
