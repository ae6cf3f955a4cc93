"""The function transformation that runs each op in the precision that suits it."""
