"""Pages. Thin: selectors read, services write, templates (plain HTML + static/) show.

Contract with templates/ (every template extends templates/base.html; `user`, `request`, `messages` are always there;
CSP: no inline script or style; POST forms carry {% csrf_token %}):

base.html            no context of its own. URL names: search-list "/", search-new "/searches/new", worker-list
                     "/workers", login "/login", logout "/logout" (POST), api-schema "/api/schema". `app_version`.
registration/login.html   `form` (username, password), `next`, `token_refused` (bool). See webapp/accounts/views.py.
searches/list.html   `searches`: Search rows, newest first, each with .id .title .status (running|paused|cancelling|
                     finished|failed) .created (datetime) .finished (datetime or None) .speedup (float or None, over
                     stock autoregressive) .rounds .trials .get_absolute_url ; `status` (the ?status= filter, or "") ;
                     `page` (Django Page of the same rows: has_previous, has_next, next_page_number, ...).
searches/new.html    `form` (webapp/searches/forms.py NewSearch: target drafter platform dtype max_prompt_tokens
                     max_new_tokens temperature prompts budget_seconds budget_trials seed, each with label, help_text,
                     errors; form.non_field_errors). Status 200, or 422 with errors. `platforms_online`: list of "cpu",
                     "cuda".
searches/live.html   `search` (a Search row as above), `view` (dict: engine.search.view; embed it with
                     {{ view|json_script:"view" }}), `events` (list of the events so far, JSON-ready, newest 500;
                     {{ events|json_script:"events" }}), `ws_url` ("/ws/searches/7"; the client adds ?after=SEQ and
                     the scheme), `api_url` ("/api/searches/7"; POST api_url/pause, /resume, /cancel with header
                     X-CSRFToken: token of {% csrf_token %}), `bundle_url` ("/searches/7/bundle", always set; it is a
                     404 until view.bundle is set), `control_url` ("/searches/7/" + pause|resume|cancel: plain POST
                     forms for use without scripts; they answer with a redirect to the page), `worker_online` (bool),
                     `trial` (number of the trial whose panel is open, or None: /searches/7/trials/12 is the same page).
workers.html         `workers`: list of dicts device, kind ("cpu"|"cuda"|"control"), description (device's name), since
                     (datetime), status ("working"|"idle"), job (dict search, title, url, key, or None), and for staff
                     name, host, pid;
                     `waiting`: list of dicts where, count (queued jobs nobody works on yet).
400/403/403_csrf/404/500.html   no context (500 and 404 may not rely on `user`).
"""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from engine.errors import UserError
from webapp.searches import selectors, services
from webapp.searches.forms import NewSearch
from webapp.searches.models import Search
from webapp.searches.projection import PROJECTIONS


@require_GET
@login_required
def search_list(request: HttpRequest) -> HttpResponse:
    status = request.GET.get("status", "")
    rows = selectors.searches_of(request.user, status=status if status in Search.Status else "")
    page = Paginator(rows, 25).get_page(request.GET.get("page"))
    return render(request, "searches/list.html", {"searches": page.object_list, "page": page, "status": status})


@require_http_methods(["GET", "POST"])
@login_required
def search_new(request: HttpRequest) -> HttpResponse:
    form = NewSearch(request.POST or None)
    if request.method == "POST" and form.is_valid():
        search = form.launch(request.user)
        if search is not None:
            return redirect(search)
    context = {"form": form, "platforms_online": selectors.platforms_online()}
    return render(request, "searches/new.html", context, status=422 if form.errors else 200)


@require_GET
@never_cache
@login_required
def search_live(request: HttpRequest, pk: int, number: int | None = None) -> HttpResponse:
    """The page, and with `number` the panel of one trial open in it."""
    search = selectors.search_or_404(request.user, pk)
    if number is not None:
        selectors.trial_or_404(search, number)
    context = {
        "search": search,
        "trial": number,
        "view": PROJECTIONS.view(search.pk),
        "events": selectors.newest_events(search, 500),
        "ws_url": f"/ws/searches/{search.pk}",
        "api_url": reverse("api-search", args=[search.pk]),
        "bundle_url": reverse("search-bundle", args=[search.pk]),
        "control_url": f"/searches/{search.pk}/",
        "worker_online": search.where in selectors.platforms_online(),
    }
    return render(request, "searches/live.html", context)


@require_POST
@login_required
def search_control(request: HttpRequest, pk: int, command: str) -> HttpResponse:
    search = selectors.search_or_404(request.user, pk)
    if command not in services.COMMANDS:
        raise Http404
    try:
        services.COMMANDS[command](search.pk, by=request.user.get_username())
    except UserError as error:
        messages.error(request, error.sentence)
    return redirect(search)


@require_GET
@login_required
def search_bundle(request: HttpRequest, pk: int) -> HttpResponse:
    return bundle_response(selectors.search_or_404(request.user, pk))


@require_GET
@login_required
def worker_list(request: HttpRequest) -> HttpResponse:
    context = {"workers": selectors.workers_for(request.user), "waiting": selectors.waiting_jobs()}
    return render(request, "workers.html", context)


@require_GET
def healthz(request: HttpRequest) -> JsonResponse:
    """For the supervisor and for load balancers: the web answers and reaches its database."""
    selectors.check_database()
    return JsonResponse({"status": "ok"})


def bundle_response(search: Search) -> HttpResponse:
    """The search's bundle as a download. Raises Http404 while there is none."""
    bundle = selectors.bundle_of(search)
    response = HttpResponse(bytes(bundle.content), content_type="application/zip")
    response["Content-Disposition"] = f'attachment; filename="specpilot-search-{search.pk}.zip"'
    response["X-Content-SHA256"] = bundle.sha256
    return response
