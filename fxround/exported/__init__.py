"""Files of compiled modules: ``RoundedModule.export`` writes them, ``fxround.load`` reads them."""
