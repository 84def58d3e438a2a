"""The page of a report, as one HTML file, and its charts as pictures. Imports no torch."""
