"""What a compiled model says of its own numbers: how many bits are real, where they are lost, and which site is to blame."""
