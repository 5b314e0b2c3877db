"""Head and laptop: report.html, the visual report of a run."""
