def page(o):
    return repr(o)
