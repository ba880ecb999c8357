"""Replacements in kernels_cu/common/qwen2_attend.cuh, which tests of every kernel that includes it are to notice.

Each with the position where it shows.
"""

WRONG = {
    "without itself": (50, ("if (g > last) s", "if (g >= last) s")),
    "without itself, upper keys": (60, ("if (g + 8 > last) s", "if (g + 8 >= last) s")),
    "the other way round": (50, ("lo.x * cosine.x - hi.x * sine.x", "lo.x * cosine.x + hi.x * sine.x")),
    "turns in float": (32_767, ("return float(turns - rint(turns));", "return float(turns);")),
}
