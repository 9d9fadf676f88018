"""Number formats, as the report prints them."""

DASH = "\N{EN DASH}"  # stands for what is not known
TIMES = "\N{MULTIPLICATION SIGN}"
SCALES = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"))


def short(value: float | None, digits: int = 3) -> str:
    """Three significant digits with a scale letter: 1234567 -> '1.23 M'. None -> a dash."""
    if value is None:
        return DASH
    for scale, letter in SCALES:
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def fixed(value: float | None, places: int = 4) -> str:
    """Fixed number of decimals. None -> a dash."""
    return DASH if value is None else f"{value:.{places}f}"


def power(value: float | None) -> str:
    """Scientific, readable: 1.5e9 -> '1.50 × 10⁹'. None -> a dash."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa} {TIMES} 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def duration(seconds: float | None) -> str:
    """'3 h 05 min', '4 min 10 s', '12 s'. None -> a dash."""
    if seconds is None:
        return DASH
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
