"""The prompts of `attn demo`: forty, of 1 to about 600 bytes, most of them sharing a prefix with others.

Their style is that of the shipped model's training text, the documentation of Python.
"""

_MODULE = '''# tablekit.reader
"""Read and write tables of plain text.

A table is a sequence of rows, and a row is a sequence of strings. The reader
accepts any object that supports the iterator protocol and returns a string
each time its __next__() method is called; file objects and list objects are
both suitable. If the optional argument delimiter is given, it must be a string
of one character, and fields are separated at each place where it occurs.
Quoted fields may contain the delimiter and line breaks; the quotes themselves
are removed. The writer does the reverse, so that a table can be read again.

'''

_CLASS = '''class Channel(object):
    """A connection between two threads that carries one message at a time.

    The sender blocks until the receiver has taken the message.
    """
'''

_STATEMENT = """The "with" statement
********************

The "with" statement is used to wrap the execution of a block with
methods defined by a context manager.
"""

_SHORT = (
    "T",
    "i",
    "def ",
    "import ",
    "class A",
    "Return ",
    "for x in",
    "try:\n    ",
    "The value",
    "raise Type",
    "    Example:",
    "def __init__(self",
    "Return True if the",
    "If the argument is ",
    "This function returns the",
    "class Decimal(object):\n    ",
)

_LONGER = {
    _MODULE: (
        "def read(",
        "def write(table, ",
        "class Reader(",
        "The following functions are ",
        "Note that the ",
        "Example:\n\n    >>> ",
        'def open(name, mode=\'r\'):\n    """',
        'class Dialect:\n    """',
        "Errors are reported by raising ",
        "If the delimiter is not found, ",
    ),
    _CLASS: (
        "    def send(",
        '    def receive(self, timeout=None):\n        """',
        '    def close(self):\n        """Close the ',
        "    def __enter__(self",
        "    def __repr__(",
        '    def fileno(self):\n        """Return ',
        "    @property\n    def ",
    ),
    _STATEMENT: (
        "\nThe execution of the ",
        "\nIf the suite was exited ",
        "\n   with ",
        "\nChanged in version 3",
        "\nSee also:\n\n  ",
        "\nThe following code:\n\n   ",
        "\nAn exception ",
    ),
}

# Prompts of one beginning share whole blocks of the cache, which the demo counts.
_ALL = (*_SHORT, *(beginning + end for beginning, ends in _LONGER.items() for end in ends))
PROMPTS = tuple(_ALL[7 * i % len(_ALL)] for i in range(len(_ALL)))  #: short and long ones mixed
