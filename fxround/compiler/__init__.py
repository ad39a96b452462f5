"""Where passes and runtime meet: captured graphs, lowered, scheduled, and chosen for a call."""
