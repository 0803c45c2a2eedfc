"""The report: records of runs, benchmarks and the lab -> one HTML page that needs nothing else.

`inputs` reads files, `series` averages runs over seeds, `figures`, `tables` and `words` say what they show,
`pictures` draws it for pages without scripts, `page` puts it together, `watch` serves it while a run goes on.
"""
