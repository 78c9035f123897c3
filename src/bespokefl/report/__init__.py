"""The report of an output folder: one HTML page that needs nothing else, and its charts as SVG and PNG for a paper.

`gather` and its neighbours turn files into tables, `charts` turn tables into Vega-Lite, `page` puts both into HTML,
and `page.js` connects them in the browser. Altair and vl-convert are imported only when a report is made.
"""
