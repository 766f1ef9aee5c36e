"""Interfaces for users of other systems, over the one engine. Nothing below imports them."""
