"""The report: records of runs, benchmarks and the lab -> one HTML page that needs nothing else.

`inputs` reads files, `series` averages runs over seeds, `plots` and `summary` say what they show, `measurements`
shows benchmarks and the lab, `page` puts it together and serves it while a run goes on.
"""
