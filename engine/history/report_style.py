"""The report's style: one sheet, light and dark."""

STYLE = """
:root{--bg:#fbfbfa;--fg:#1d2430;--dim:#667085;--line:#e3e5ea;--card:#fff;--queued:#b8c0cc;--running:#2f7ed8;--preempted:#e5832d;
--idle:#d9dee6;--owned:#2f7ed8;--fenced:#e5832d;--cached:#a9cdf3;--waiting:#e5832d;--bar:#2f7ed8}
@media (prefers-color-scheme:dark){:root{--bg:#12161d;--fg:#e6e9ef;--dim:#98a2b3;--line:#2a3140;--card:#1a202b;--queued:#56617a;
--running:#5aa2f2;--preempted:#f0a052;--idle:#333c4d;--owned:#5aa2f2;--fenced:#f0a052;--cached:#2c517c;--waiting:#f0a052;
--bar:#5aa2f2}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:14px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 24px 48px}
h1{font-size:22px;margin:0;overflow-wrap:anywhere}
h2{font-size:15px;margin:0}
p,footer{color:var(--dim);margin:2px 0 12px}
footer{margin-top:32px;font-size:12px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:12px;margin:16px 0 8px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.card h2{font-size:12px;font-weight:500;color:var(--dim)}
.card b{display:block;font-size:20px;font-variant-numeric:tabular-nums}
.card span{font-size:12px;color:var(--dim)}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px;margin-top:16px}
.chart{overflow-x:auto}
svg{display:block;width:100%;min-width:640px;height:auto}
.grid{stroke:var(--line)}
.tick,.name{font-size:10.5px;fill:var(--dim)}
rect.queued{fill:var(--queued)}rect.running{fill:var(--running)}rect.preempted{fill:var(--preempted)}rect.idle{fill:var(--idle)}
path.owned,path.running{fill:var(--owned)}path.fenced{fill:var(--fenced)}path.cached{fill:var(--cached)}
path.waiting{fill:var(--waiting)}
.legend{display:flex;gap:16px;font-size:12px;color:var(--dim);margin:0 0 6px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:5px}
i.queued{background:var(--queued)}i.running{background:var(--running)}i.preempted{background:var(--preempted)}
i.idle{background:var(--idle)}i.owned{background:var(--owned)}i.fenced{background:var(--fenced)}
i.cached{background:var(--cached)}i.waiting{background:var(--waiting)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:500;color:var(--dim);font-size:12px}
th,td{padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
.bars{margin-bottom:14px}.bars td.wide{width:60%}
i.bar{display:inline-block;height:10px;border-radius:3px;background:var(--bar);min-width:2px}
@media print{section,.card{break-inside:avoid}}
""".strip()
