"""Head and laptop: report.html, a run for the eyes."""
