"""The style sheet of the page, and the colours of charts."""

# Okabe and Ito's palette, told apart by colour-blind readers too; yellow is left out, being faint on white.
# The order puts the two that differ the most first. The second set is lighter, for dark pages.
LIGHT_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b5568f", "#b98500", "#3d9bd6", "#5b5b5b")
DARK_PALETTE = ("#56a8e8", "#ff8f4d", "#35c79a", "#e093bd", "#e3b341", "#9fd4f5", "#b0b0b0")
COLOURS = len(LIGHT_PALETTE)

# The other colours, for light and for dark pages.
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
    """Write the colours as custom properties, for light and for dark."""
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

PAGE_CSS = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 FONT;font-variant-numeric:tabular-nums}
main{max-width:1600px;margin:0 auto;padding:32px clamp(16px,3vw,48px) 64px}
h1,h2,h3,p,ul,dl,dd,figure{margin:0;padding:0}
h1{font-size:26px;line-height:1.25;font-weight:650;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;font-weight:650;margin:40px 0 12px}
h3{font-size:14px;font-weight:600}
ul{list-style:none}
.path{color:var(--muted);font-size:13px;overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:8px 28px;margin-top:16px}
.facts div{display:flex;gap:7px;align-items:baseline}
.facts dt,.tile dt,.muted{color:var(--muted)}
.facts dd{font-weight:600}
.versions{margin-top:8px;font-size:13px;color:var(--muted)}
.tiles{display:grid;grid-template-columns:repeat(2,1fr);gap:12px;margin-top:24px}
@media (min-width:860px){.tiles{grid-template-columns:repeat(4,1fr)}}
.tile,.card,.chart{background:var(--card);border:1px solid var(--border);border-radius:10px;min-width:0}
.tile{padding:14px 16px}
.tile dt{font-size:13px}
.tile dd{font-size:23px;line-height:1.3;font-weight:600;letter-spacing:-.01em;white-space:nowrap}
.tile .detail{font-size:13px;font-weight:400;letter-spacing:0;color:var(--muted);white-space:normal}
.table{overflow-x:auto;margin-top:24px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:8px 16px;text-align:left;border-top:1px solid var(--border);vertical-align:top;min-width:150px}
thead th,thead td{border-top:0;padding-top:12px}
thead th{font-weight:600;overflow-wrap:anywhere}
thead .swatch{display:inline-block;vertical-align:middle;margin-right:8px}
tbody th,thead td{font-weight:400;color:var(--muted);position:sticky;left:0;background:var(--card);min-width:130px}
td small,th small{display:block;color:var(--muted);font-size:12px;font-weight:400}
.healths{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr));gap:12px;align-items:start}
.notes{padding:4px 16px}
.notes li{display:grid;grid-template-columns:20px 1fr;gap:10px;padding:8px 0;border-top:1px solid var(--border)}
.notes li:first-child{border-top:0}
.notes p{overflow-wrap:anywhere;max-width:110ch}
.notes h3{padding:10px 0 4px}
.mark{width:20px;height:20px;margin-top:1px;border-radius:50%;border:1.5px solid;font-size:12px;font-weight:700;
line-height:17px;text-align:center}
.bad .mark{color:var(--card);background:var(--bad);border-color:var(--bad)}
.warning .mark{color:var(--warning)}
.good .mark{color:var(--good)}
.note .mark{color:var(--note)}
.bar{position:sticky;top:0;z-index:5;display:flex;flex-wrap:wrap;gap:8px 24px;align-items:center;
background:var(--page);border-bottom:1px solid var(--border);margin-top:36px;padding:10px 0}
.switch{display:none;gap:8px;align-items:center;font-size:13px;color:var(--muted)}
.js .switch{display:flex}
.switch div{display:flex;border:1px solid var(--border);border-radius:8px;overflow:hidden;background:var(--card)}
button{font:inherit;color:inherit;background:none;border:0;padding:5px 12px;cursor:pointer}
button[aria-pressed=true]{background:var(--text);color:var(--page)}
button:focus-visible,summary:focus-visible{outline:2px solid var(--c0);outline-offset:-2px}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;color:var(--muted);min-width:0}
.legend li{display:flex;align-items:center;gap:6px;overflow-wrap:anywhere}
.bar .legend{font-size:14px;color:var(--text);max-height:88px;overflow-y:auto}
.swatch{flex:none;width:14px;height:0;border-top:3px solid var(--c);border-radius:2px}
.swatch.dashed{border-top-style:dotted}
.bar+h2{margin-top:24px}
.charts{display:grid;grid-template-columns:minmax(0,1fr);gap:12px}
@media (min-width:760px){.charts{grid-template-columns:repeat(2,minmax(0,1fr))}}
@media (min-width:760px) and (max-width:1079.9px){.charts.odd>:last-child:nth-child(odd){grid-column:1/-1}}
@media (min-width:1080px){.charts.odd{grid-template-columns:repeat(3,minmax(0,1fr))}}
@media (min-width:1480px){.charts.even:has(>:nth-child(3)){grid-template-columns:repeat(4,minmax(0,1fr))}}
.chart{padding:14px 18px 8px 14px;display:flex;flex-direction:column}
.variant{margin-top:auto}
@media (min-width:760px){.chart.wide{grid-column:span 2}}
figcaption{display:flex;flex-wrap:wrap;gap:0 10px;align-items:baseline;min-height:24px;margin-bottom:12px}
.unit,.axis{color:var(--muted);font-size:12px}
.unit{white-space:nowrap}
figcaption .legend{margin-left:auto;font-size:12px}
.plot{position:relative;height:190px;margin:0 4px 22px 50px}
.area{display:block;width:100%;height:100%;overflow:visible}
.area path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--grid);stroke-width:1}
.reference{stroke:var(--reference);stroke-width:1;stroke-dasharray:4 4}
.line{stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.line.dashed{stroke-dasharray:1 5}
.line.faint{stroke-width:1;opacity:.25}
.dots{stroke:var(--c);stroke-width:6;stroke-linecap:round}
.x,.y{position:absolute;font-size:11px;line-height:14px;color:var(--muted);white-space:nowrap;pointer-events:none}
.y{right:100%;margin-right:8px;transform:translateY(-50%)}
.x{top:100%;margin-top:6px;transform:translateX(-50%)}
.axis{display:flex;gap:12px;justify-content:space-between;margin-right:4px;font-size:11px}
.cross{position:absolute;top:0;bottom:0;width:0;border-left:1px solid var(--reference);pointer-events:none}
.spot{position:absolute;width:9px;height:9px;margin:-4.5px;border-radius:50%;background:var(--c);
border:2px solid var(--card);pointer-events:none}
.tip{position:absolute;top:4px;z-index:4;background:var(--card);border:1px solid var(--border);border-radius:8px;
box-shadow:0 4px 16px rgb(0 0 0/.14);padding:7px 10px;font-size:12px;line-height:1.5;pointer-events:none;
max-width:min(280px,80vw);width:max-content}
.tip div{display:flex;gap:8px;align-items:center;justify-content:space-between}
.tip span{color:var(--muted);overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.tip .swatch{display:inline-block;vertical-align:middle;margin-right:6px}
.tip b{font-weight:600;white-space:nowrap}
.variant{display:none}
[data-axis=documents] .variant[data-axis=documents],[data-axis=step] .variant[data-axis=step]{display:block}
.empty{padding:16px;color:var(--muted)}
.absent{margin-top:16px;font-size:13px;color:var(--muted)}
.examples{padding:0 16px;margin-top:12px}
.example{border-top:1px solid var(--border);padding:16px 0}
.example:first-child{border-top:0}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:16px;margin-top:10px}
.text{white-space:pre-wrap;overflow-wrap:anywhere;max-height:260px;overflow-y:auto;font-size:14px}
.pair>div{border-left:2px solid var(--border);padding-left:12px;min-width:0}
.head{display:flex;gap:10px;font-size:13px;color:var(--muted);margin-bottom:4px}
.head b{color:var(--text);font-weight:600}
details{margin-top:12px}
summary{cursor:pointer;padding:12px 16px;font-weight:600;overflow-wrap:anywhere}
pre{margin:0;padding:0 16px 16px;overflow-x:auto;font:13px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media (max-width:520px){main{padding-top:20px}.tile{padding:12px}
.tile dd{font-size:clamp(15px,4.5vw,18px)}.tile .detail{font-size:12px}
.chart{padding:12px 14px 8px 8px}.x.minor{display:none}.bar .legend{width:100%}.bar{position:static}}
@media print{.bar{position:static}.chart,.tile,.example{break-inside:avoid}}
""".replace("FONT", FONT)
