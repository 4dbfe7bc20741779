"""report.html: one offline file to decide with: what was learned, which configuration, how sure, what to type."""

from sweep.decide.report.page import REPORT_FILE, report_html, write_report

__all__ = ["REPORT_FILE", "report_html", "write_report"]
