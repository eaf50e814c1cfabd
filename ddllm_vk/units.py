"""How quantities are written for people."""


def format_bytes(count: float) -> str:
    """Decimal units, as disks and the Hub count."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 999.5 else f"{count:.0f} GB"
