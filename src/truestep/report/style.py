"""The colours of the page and of its charts."""

# Okabe and Ito's palette for colour-blind readers, without its yellow, which is faint on white. The two most different
# colours come first. The second palette is lighter, for dark pages.
LIGHT_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b5568f", "#b98500", "#3d9bd6", "#5b5b5b")
DARK_PALETTE = ("#56a8e8", "#ff8f4d", "#35c79a", "#e093bd", "#e3b341", "#9fd4f5", "#b0b0b0")
COLOURS = len(LIGHT_PALETTE)

# The other colours, for light and dark pages.
SHADES = {
    "page": ("#f7f7f5", "#121314"),
    "card": ("#ffffff", "#1a1b1d"),
    "border": ("#e3e2dd", "#2d2f32"),
    "grid": ("#ecebe7", "#292b2e"),
    "text": ("#1d1d1b", "#e9e8e4"),
    "muted": ("#66645e", "#a3a29c"),
    "reference": ("#8f8c84", "#77766f"),
    "bad": ("#b3261e", "#ff8a80"),
    "warning": ("#8a5a00", "#f0b849"),
    "good": ("#17703a", "#62cf8c"),
    "note": ("#55626e", "#a4b3c0"),
}


def palette_css(root: str = ":root") -> str:
    """Return the colours as CSS custom properties, for light and dark pages."""
    light, dark = (
        "".join(f"--{name}:{shades[index]};" for name, shades in SHADES.items())
        + "".join(f"--c{number}:{colour};" for number, colour in enumerate(palette))
        for index, palette in enumerate((LIGHT_PALETTE, DARK_PALETTE))
    )
    classes = "".join(f".colour-{index}{{--c:var(--c{index})}}" for index in range(COLOURS))
    return (
        f"{root}{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{{root}{{{dark}}}}}\n{classes}\n"
    )


FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
