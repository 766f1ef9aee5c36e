"""Measures a host's CPU with Hexad's own steps and collectives, and fits the constants of a hardware file."""
