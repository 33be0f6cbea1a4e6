"""How one vector per host becomes their sum, exactly or nearly."""
