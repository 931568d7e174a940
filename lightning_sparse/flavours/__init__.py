"""The public classes for each package of Lightning, whose own classes do not mix."""
