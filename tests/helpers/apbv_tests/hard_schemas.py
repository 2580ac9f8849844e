"""JSON schemas that are hard to compile."""


def many_patterns(number: int = 40, name: str = "x") -> dict:
    """Which takes llguidance hours, and all memory; by its name it differs from others."""
    patterns = [f".*{chr(97 + place % 26)}.{{{place}}}$" for place in range(number)]
    return {
        "title": name,
        "allOf": [{"type": "string", "pattern": pattern} for pattern in patterns],
    }
