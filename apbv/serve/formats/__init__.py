"""How models write tool calls, and how calls are found in answers."""
