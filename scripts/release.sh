# scripts/wheel sources this file in the root of the project.

# check_tag: fails if the commit has a tag vX.Y.Z and penstock/__init__.py has another version.
check_tag() {
  local version tag
  version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' penstock/__init__.py)
  for tag in $(git tag --points-at HEAD 2>/dev/null | grep -E '^v[0-9]' || true); do
    if [ "$tag" != "v$version" ]; then
      printf 'penstock: error: the tag %s is not v%s, the version in penstock/__init__.py\n' "$tag" "$version" >&2
      return 1
    fi
  done
}
