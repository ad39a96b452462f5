"""Attribution: which rounding of a model costs how much of a result, from one run and its derivatives."""
