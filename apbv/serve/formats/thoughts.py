"""Thoughts: what a model writes for itself before or inside an answer, between two tags."""

from collections.abc import Sequence

# By the tag that begins a thought, the one that ends it: most models', Claude's and its imitators',
# Mistral's, Seed's, and Kimi's.
CLOSING_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "◁think▷": "◁/think▷",
}


def opened_thought(prompt: str, continued: Sequence[str] = ()) -> str | None:
    """Return the tag of a thought in which a prompt ends; None: it ends in none.

    Args:
        prompt: the prompt as rendered. What users write in it about tags opens nothing: only its
            very end counts, where a chat template begins the answer.
        continued: the texts of the message that the answer continues, if it continues one.
    """
    end = prompt.rstrip()
    for opening in CLOSING_TAGS:
        if end.endswith(opening):
            return opening
    answer = "\n".join(continued)
    latest = max(CLOSING_TAGS, key=lambda opening: answer.rfind(opening))
    is_open = answer.rfind(latest) > answer.rfind(CLOSING_TAGS[latest])
    return latest if is_open else None
