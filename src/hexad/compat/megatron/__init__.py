"""The face of Megatron-LM."""
