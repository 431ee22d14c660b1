"""Two ways to send fewer bytes between ranks than one row for every (token, expert) pair, as backends of epmoe."""
