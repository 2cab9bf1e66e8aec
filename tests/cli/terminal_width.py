"""Whether text fits a terminal of default size."""


def too_wide(text: str) -> list[str]:
    """Return the lines of ``text`` with more than 80 characters."""
    return [line for line in text.splitlines() if len(line) > 80]
