"""ATen's operators: their rules, and the formulas of composite ones."""
