"""Tables as results pages show them."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence, rows: Iterable[Sequence], align: str = "---:") -> str:
    """Format rows of cells under a header as a Markdown table."""
    lines = [header, [align] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
