"""Send every assignment to its owner rank, exactly as many rows as there are."""
