"""Sign-in by password or by the supervisor's one-time URL, and sign-out.

Template registration/login.html gets `form` (username, password), `next` (hidden field of that name), and
`token_refused` (True where a one-time URL was used before or has expired: say that the terminal prints a new
one at each start of `manage.py up`).
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth import login
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseRedirectBase
from django.shortcuts import redirect
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache

from webapp.accounts.services import redeem_sign_in_token


@method_decorator(never_cache, name="dispatch")
class SignIn(LoginView):
    """GET /login, POST /login, GET /login?token=..."""

    redirect_authenticated_user = True

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse | HttpResponseRedirectBase:
        token = request.GET.get("token", "")
        if not token or request.method == "HEAD":
            return super().get(request, *args, **kwargs)
        user = redeem_sign_in_token(token)
        if user is None:
            return self.render_to_response(self.get_context_data(token_refused=True), status=403)
        login(request, user, backend="django.contrib.auth.backends.ModelBackend")
        return redirect(self.get_success_url())
