"""Draw the HTML report: charts, scales, SVG."""
