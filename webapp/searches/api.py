"""The REST API: create, list, read, pause, resume and cancel searches, their events and their bundle."""

from __future__ import annotations

from typing import Any

import django_filters
from django.http import HttpResponse
from django.urls import reverse
from django_filters.rest_framework import DjangoFilterBackend
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.exceptions import NotFound, ParseError
from rest_framework.generics import GenericAPIView
from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer
from rest_framework.views import APIView

from engine.errors import UserError
from webapp.searches import selectors, services
from webapp.searches.models import Search
from webapp.searches.projection import PROJECTIONS
from webapp.searches.schema import EVENTS, NEW_SEARCH, SEARCH, SUMMARY, TRIAL, WORKERS, answers
from webapp.searches.views import bundle_response

MOST_EVENTS = 5000
FIELDS = {"deployment", "budget", "seed", "plan"}


class SearchFilter(django_filters.FilterSet):
    status = django_filters.ChoiceFilter(choices=Search.Status.choices)
    target = django_filters.CharFilter(field_name="deployment__target")
    platform = django_filters.CharFilter(field_name="deployment__platform")

    class Meta:
        model = Search
        fields = ("status",)


class SearchSummary(BaseSerializer[Search]):
    """A search without its view."""

    def to_representation(self, search: Search) -> dict[str, Any]:
        return {
            "id": search.pk,
            "title": search.title,
            "created": search.created,
            "finished": search.finished,
            "status": search.status,
            "speedup": search.speedup,
            "rounds": search.rounds,
            "trials": search.trials,
            "deployment": search.deployment.data,
            "links": _links(search),
        }


def _links(search: Search) -> dict[str, str]:
    names = ("events", "bundle", "pause", "resume", "cancel")
    links = {name: reverse(f"api-search-{name}", args=[search.pk]) for name in names}
    return {"self": reverse("api-search", args=[search.pk]), "page": search.get_absolute_url(), **links}


def _described(search: Search) -> dict[str, Any]:
    return {**SearchSummary(search).data, "view": PROJECTIONS.view(search.pk)}


class SearchList(GenericAPIView):
    queryset = Search.objects.none()
    serializer_class = SearchSummary
    filter_backends = (DjangoFilterBackend,)
    filterset_class = SearchFilter

    @extend_schema(operation_id="list_searches", responses=answers({200: {"type": "array", "items": SUMMARY}}, 400))
    def get(self, request: Request) -> Response:
        """Your searches, newest first, in pages."""
        rows = self.filter_queryset(selectors.searches_of(request.user))
        page = self.paginate_queryset(rows)
        return self.get_paginated_response(SearchSummary(page, many=True).data)

    @extend_schema(
        operation_id="create_search",
        request={"application/json": NEW_SEARCH},
        responses=answers({201: SEARCH}, 400, 422),
    )
    def post(self, request: Request) -> Response:
        """Check a deployment and start its search. Nothing is queued where anything is wrong with it."""
        data = request.data
        if not isinstance(data, dict):
            raise ParseError("The request must be a JSON object.")
        unknown = sorted(set(data) - FIELDS)
        if unknown:
            raise UserError(f"Unknown field {unknown[0]!r}; known are {', '.join(sorted(FIELDS))}.", field=unknown[0])
        if "deployment" not in data:
            raise UserError("A search needs a deployment.", field="deployment")
        seed = data.get("seed")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise UserError("The seed must be a whole number.", field="seed")
        search = services.create_search(
            owner=request.user,
            deployment=services.deployment_of(data["deployment"]),
            budget=services.budget_of(data["budget"]) if data.get("budget") is not None else None,
            seed=seed,
            plan=services.plan_of(data["plan"]) if data.get("plan") is not None else None,
        )
        location = reverse("api-search", args=[search.pk])
        return Response(_described(_reread(search)), status=201, headers={"Location": location})


class SearchDetail(APIView):
    @extend_schema(operation_id="read_search", responses=answers({200: SEARCH}, 404))
    def get(self, request: Request, pk: int) -> Response:
        """One search with everything that its page shows."""
        return Response(_described(selectors.search_or_404(request.user, pk)))


class SearchCommand(APIView):
    command = ""
    parser_classes = (JSONParser, FormParser, MultiPartParser)  # there is no body to read: any kind of none will do

    @extend_schema(request=None, responses=answers({200: SEARCH}, 404, 409))
    def post(self, request: Request, pk: int) -> Response:
        """Pause and resume take effect between jobs; cancel stops the job in flight too."""
        search = selectors.search_or_404(request.user, pk)
        services.COMMANDS[self.command](search.pk, by=request.user.get_username())
        return Response(_described(_reread(search)))


class SearchEvents(APIView):
    @extend_schema(
        operation_id="read_events",
        parameters=[OpenApiParameter("after", int, description="events with a higher number only", default=0)],
        responses=answers({200: EVENTS}, 400, 404),
    )
    def get(self, request: Request, pk: int) -> Response:
        """Events after a number, at most 5000; ask again after `last` until none is left."""
        search = selectors.search_or_404(request.user, pk)
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdecimal() and len(after) < 10):
            raise ParseError("`after` must be the number of an event: 0 or more.")
        events = selectors.events_after(search.pk, int(after), MOST_EVENTS)
        return Response({"events": events, "last": events[-1]["seq"] if events else int(after)})


class TrialDetail(APIView):
    @extend_schema(operation_id="read_trial", responses=answers({200: TRIAL}, 404))
    def get(self, request: Request, pk: int, number: int) -> Response:
        """The evidence for one trial's verdict: counts, first divergence, timed pairs, costs, and how to replay it."""
        return Response(selectors.trial_or_404(selectors.search_or_404(request.user, pk), number))


class SearchBundle(APIView):
    @extend_schema(
        operation_id="read_bundle",
        responses={(200, "application/zip"): OpenApiTypes.BINARY, **answers({}, 404)},
    )
    def get(self, request: Request, pk: int) -> HttpResponse:
        """The tuned bundle, a zip; 404 until the search has written it."""
        return bundle_response(selectors.search_or_404(request.user, pk))


class WorkerList(APIView):
    @extend_schema(operation_id="list_workers", responses=answers({200: WORKERS}))
    def get(self, request: Request) -> Response:
        """The workers that are there now; which machine each runs on is told to staff only."""
        return Response({"workers": selectors.workers_for(request.user), "waiting": selectors.waiting_jobs()})


@extend_schema(exclude=True)
class NotThere(APIView):
    """Any other path below /api: a problem, not a page."""

    def get(self, request: Request, rest: str) -> Response:
        raise NotFound("There is no such resource.")

    post = put = patch = delete = get


def _reread(search: Search) -> Search:
    return Search.objects.select_related("deployment").get(pk=search.pk)
