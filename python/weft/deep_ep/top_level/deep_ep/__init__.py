"""`deep_ep` of Weft: the package weft.deep_ep under the name that programs import."""

try:
    from weft.deep_ep import alias
except ImportError as error:
    raise ImportError(f"deep_ep here is that of Weft, which can't be imported ({error}): pip install weft") from error

alias.become(__file__)
