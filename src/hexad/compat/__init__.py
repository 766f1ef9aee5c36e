"""Doors for users of other systems: thin faces over the one engine. Nothing below imports them."""
