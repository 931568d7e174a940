"""The public classes bound to each flavour of Lightning, whose own classes do not mix; nothing else is in here."""
