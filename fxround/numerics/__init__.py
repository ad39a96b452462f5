"""What rounding means and how it is computed. Imports neither torch nor the rest of the package."""
