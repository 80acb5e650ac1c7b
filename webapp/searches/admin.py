"""The record, to look at. Events are append-only and everything else follows from them, so nothing is edited here."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from webapp.searches.models import Bundle, Deployment, Event, Job, Round, Search, Trial


class ReadOnly(admin.ModelAdmin):
    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False


@admin.register(Search)
class SearchAdmin(ReadOnly):
    list_display = ("id", "title", "owner", "status", "speedup", "rounds", "trials", "created")
    list_filter = ("status", "where")
    search_fields = ("title",)


@admin.register(Deployment)
class DeploymentAdmin(ReadOnly):
    list_display = ("digest", "target", "drafter", "platform", "dtype")
    list_filter = ("platform", "dtype")


@admin.register(Job)
class JobAdmin(ReadOnly):
    list_display = ("search", "key", "where", "status", "lease_owner", "lease_expires", "attempts", "lost")
    list_filter = ("status", "where", "kind")


@admin.register(Trial)
class TrialAdmin(ReadOnly):
    list_display = ("search", "number", "round", "kind", "arm", "stage", "status", "verdict", "ratio")
    list_filter = ("verdict", "kind", "stage")


@admin.register(Event)
class EventAdmin(ReadOnly):
    list_display = ("search", "seq", "type", "time")
    list_filter = ("type",)


@admin.register(Round)
class RoundAdmin(ReadOnly):
    list_display = ("search", "number", "improved")


@admin.register(Bundle)
class BundleAdmin(ReadOnly):
    list_display = ("search", "file", "size", "sha256", "created")
    exclude = ("content",)
