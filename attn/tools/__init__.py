"""Programs for developers and users of the command line; the library imports none of them."""
